import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Chats by the JDK's own client with its defaults: java tests/clients/scripted/JdkClient.java URL. */
class JdkClient {
    public static void main(String[] arguments) throws Exception {
        for (String stream : new String[] {"false", "true"}) {
            String body = "{\"model\": \"scripted\", \"messages\": [{\"role\": \"user\", \"content\": \"Hi.\"}], \"stream\": " + stream + "}";
            HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0] + "/v1/chat/completions"))
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(body))
                .build();
            HttpResponse<String> answer = HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString());
            if (answer.statusCode() != 200 || !answer.body().contains("Hello there.")) {
                System.err.println(answer.statusCode() + " " + answer.body());
                System.exit(1);
            }
        }
        System.out.print("chat, chat stream with HttpClient's defaults, which offer HTTP/2");
    }
}
